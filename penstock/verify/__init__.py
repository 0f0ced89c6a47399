"""`penstock verify`: run the same texts through a model's reference library and Penstock, and compare."""

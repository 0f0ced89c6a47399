"""`penstock verify`: the same texts through a model's reference library and through Penstock, compared."""

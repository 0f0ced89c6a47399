"""From logits to tokens: what a batch's rows ask for, and nothing else, is done."""

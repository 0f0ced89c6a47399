"""From logits to tokens. A step does only what some row of its batch asks for."""

"""From logits to tokens: penalties, filters, stateless random numbers, log probabilities."""

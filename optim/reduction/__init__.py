"""The arithmetic of one reduction: cells, error feedback, weights, robust means, low rank."""

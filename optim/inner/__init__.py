"""Inner optimizers, and which one a method takes."""

"""The training loop's side: windows of inner steps, and what follows from a committed round."""

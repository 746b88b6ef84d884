"""Parameters: the table of all tensors, initial values, quantised weights, and how meshes divide them."""

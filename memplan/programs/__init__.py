"""What is proved: linear and integer programs, and bounds from them."""

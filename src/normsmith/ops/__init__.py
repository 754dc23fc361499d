"""Pure functions: the literal float64 reference beside the fast version."""

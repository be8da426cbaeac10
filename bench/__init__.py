"""Scripts around the benchmark that need no place in the wheel."""

"""One function per CLI verb; the only place that chooses live or simulated. Prints nothing."""

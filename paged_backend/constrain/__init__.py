"""Grammar-constrained decoding: what a request may ask for, its compiled form, and its state while it runs."""

"""Running the application: what stands before its routes, the port, the process."""

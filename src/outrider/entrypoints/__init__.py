"""Where users come in: the Python API, the command line, the demonstration."""

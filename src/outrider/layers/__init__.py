"""Building blocks with parameters; every input comes by argument."""

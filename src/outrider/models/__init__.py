"""Model definitions, one package per architecture."""

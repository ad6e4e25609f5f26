"""The compiled part of the torch engine: `decoder.cpp`, its build and its Python face. Everything works without it."""

"""A model that is one GGUF file, as llama.cpp's converter writes it: read where it lies, never converted on disk.

`file` reads the head of the file and checks that it is whole; `configuration` makes of its metadata what config.json
says elsewhere, `layout` says which of its tensors is which parameter, and `tokenizer` builds the tokenizer. None of
these imports torch. `slices` gives the loader rows and columns of tensors, taken out of their blocks.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

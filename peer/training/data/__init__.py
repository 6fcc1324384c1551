"""Training data: corpora, documents, tokenizers and data sets of the Hugging Face hub.

`load.open_corpus` and `load.open_tokenizer` are the entry points.
"""

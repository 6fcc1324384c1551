"""Training data: corpora, documents, tokenizers and data sets of the Hugging Face hub."""

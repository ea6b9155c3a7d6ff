"""A demonstration on real weights: vLLM drafts answers, the gate scores them inside it (``speceyes demo``)."""

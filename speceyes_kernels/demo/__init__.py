"""A demonstration on real weights: real vLLM drafts answers, the gate scores them inside the engine (``speceyes demo``)."""

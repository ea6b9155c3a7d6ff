"""A small but real benchmark: two vision-language models trained here, and questions on which zooming matters."""

"""The code sandbox: `host` for users; the other modules run inside it."""

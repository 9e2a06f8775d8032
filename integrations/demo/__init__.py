"""The demo: a small model, the text it was trained on, and a comparison of policies."""

"""The windows of a model runner's steps, for any engine; and engines in processes of their own."""

"""The only place that imports SGLang, or reads its objects."""

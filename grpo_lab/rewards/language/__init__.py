"""In which language a text is written."""

"""Web page."""

"""Edge and cloud: the target in another process, token ids on the wire."""

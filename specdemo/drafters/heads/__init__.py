"""Methods that draft with a head on hidden states of the target."""

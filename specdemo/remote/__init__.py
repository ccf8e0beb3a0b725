"""Edge-cloud decoding: drafts at the edge, the target in the cloud."""

"""One GPU rank: token ids in, token ids out."""

"""Text to token ids: the reference, and faster engines that are used as long as they give the same ids."""

"""One run of pytest: what all tests share, what workers send, how a run ends."""

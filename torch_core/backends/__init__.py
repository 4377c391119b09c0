"""One file per kernel: translates our terms to upstream's."""

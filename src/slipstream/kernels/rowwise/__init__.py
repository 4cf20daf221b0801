"""The ops of the reference back end, row by row in plain torch."""

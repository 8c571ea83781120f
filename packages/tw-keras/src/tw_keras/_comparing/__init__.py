"""Plain Keras and towers, trained side by side on a few batches of a user's data."""

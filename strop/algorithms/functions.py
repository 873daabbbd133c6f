"""All estimators and losses of this room: importing it registers them."""

"""The machines: what is in them, and bringing up Ray on them."""

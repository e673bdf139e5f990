"""Who may ask for how much: per team in Redis, fairly within a replica, per address at the door."""

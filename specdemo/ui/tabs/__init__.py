"""What stands under the lanes, a file per tab: each lays itself out, and is filled when it is looked at."""

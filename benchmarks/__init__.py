"""Speed and memory as ratios of paired runs; `make bench` prints all of them."""

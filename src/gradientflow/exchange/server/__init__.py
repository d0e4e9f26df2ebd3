"""A parameter server: workers push shares of gradients, servers add them up and send the sums back."""

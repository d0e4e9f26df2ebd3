"""Finds what stands in a job's way before it runs: versions, interfaces, ports, clocks, slow hosts.

`facts` says what one rank is, `meeting` brings them together through the job's store, `links` measures between hosts,
`findings` judges all of it (pure functions), `parity` trains a little with DDP and with us.
"""

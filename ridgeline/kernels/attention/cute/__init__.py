"""Device objects of the Hopper attention kernels, one file a concept; see docs/hopper.md."""

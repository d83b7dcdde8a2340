"""Device objects of the Hopper attention kernels, by concept; importing this folder needs no DSL."""

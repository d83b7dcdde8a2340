"""Operations, one folder each: ref.py problem.py config.py <impl>_<arch>.py op.py."""

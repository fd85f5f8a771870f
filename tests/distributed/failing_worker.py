"""The example, where worker 1 fails after it met the others; `test_workers.py` runs it."""

import train_on_workers


class Failing(train_on_workers.Shard):
    def __getitem__(self, step):
        if self.worker == 1 and step == 3:
            raise OSError("no such row")
        return super().__getitem__(step)


train_on_workers.Shard = Failing
train_on_workers.main()

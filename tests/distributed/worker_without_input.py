"""The example, where the data of worker 1 lack an input; `test_workers.py` runs it."""

import train_on_workers


class Lacking(train_on_workers.Shard):
    def __getitem__(self, step):
        inputs, targets = super().__getitem__(step)
        if self.worker == 1:
            del inputs["paragraph_ids"]
        return inputs, targets


train_on_workers.Shard = Lacking
train_on_workers.main()

"""`titanlite plan`: the memory that a run will take, its step time and its best layout, without a GPU."""

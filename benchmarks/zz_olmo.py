import sys; sys.argv=["x","cpu","--only","olmo"]; sys.path.insert(0,"/work/main/benchmarks"); sys.path.insert(0,"/work/main")
import plan_accuracy as p
B=["--model.name=olmo3","--training.seq_len=256","--training.global_batch_size=4","--training.mixed_precision_param=float32","--data.document_mask=true"]
C=["--model.name=olmo3","--training.global_batch_size=4","--data.document_mask=true",p.RECOMPUTE+"selective"]
p.CPU_CASES[:]=[("bf16 512",1,[*C,"--training.seq_len=512"]),("f32 1024 b2",1,[*C,"--training.seq_len=1024","--training.mixed_precision_param=float32","--training.global_batch_size=2"]),("bf16 2p 256",2,[*C,"--training.seq_len=256"]),("f32 2p 256",2,[*C,"--training.seq_len=256","--training.mixed_precision_param=float32"])]
p.CPU_CASES=[("olmo "+a,b,c) for a,b,c in p.CPU_CASES]
if __name__=="__main__": p.main()

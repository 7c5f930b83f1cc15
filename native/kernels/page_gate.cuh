/* page_gate.cuh: how readers of pages order themselves after the copies that bring them and before those that overwrite them.
 *
 * A copy raises `ready` behind its bytes and begins when `consumed` says that its slots are free (stream memory operations). A
 * block waits for a page before it reads it and leaves it behind it; whoever leaves a page last raises `consumed` as far as
 * pages have been left without a gap.
 *
 * Forward progress. Blocks take their work by ticket, pages in order, so whoever holds a ticket runs, and so do or did all of
 * lower ones. A wait for page d needs a copy that waits for pages d - n_slots and before, which such blocks read; the launcher
 * groups pages to one block only where that holds for all pages of a group. Copies are given to the driver whatever the
 * grid does. A wait that is longer than limit_ns, or that the host gives up, sets `given_up` for all, and the pass goes on
 * with whatever lies there, to its end; the host is told by `stop`.
 */
#ifndef KVS_KERNELS_PAGE_GATE_CUH
#define KVS_KERNELS_PAGE_GATE_CUH

#include "numeric.cuh"
#include "step_words.h"

/* Polls between two looks at host memory. */
#define KVS_POLLS 256u

struct page_gate {
    const kvs_step_words *words; /* nullptr: all pages are there */
    volatile kvs_step_note *note;
    kvs_u64 first_demand;
    kvs_u32 first_page;
    kvs_u32 end_page;
    kvs_u64 ready; /* seen, the same in all threads */
};

/* `step` and `layer`: addresses of kvs_step_words and kvs_step_layer, or 0. */
__device__ inline page_gate gate_of(kvs_u64 step, kvs_u64 layer)
{
    page_gate gate = {nullptr, nullptr, 0, 0, 0, 0};
    if (step != 0 && layer != 0) {
        const kvs_step_layer *of = (const kvs_step_layer *)layer;
        gate.note = (volatile kvs_step_note *)of->note;
        gate.first_demand = of->first_demand;
        gate.first_page = of->first_page;
        gate.end_page = of->end_page;
        if (gate.first_page < gate.end_page) {
            gate.words = (const kvs_step_words *)step;
        }
    }
    return gate;
}

__device__ inline bool is_streamed(const page_gate *gate, kvs_u32 page)
{
    return gate->words != nullptr && page >= gate->first_page && page < gate->end_page;
}

#ifdef __CUDACC__

/* What was written before the value became visible is seen behind this. */
__device__ inline kvs_u64 load_acquire(kvs_u64 address)
{
    kvs_u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline kvs_u64 clock_ns()
{
    kvs_u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

/* Tests: come late, by something of no pattern. */
__device__ inline void come_late(const kvs_step_words *words)
{
    if (words != nullptr && words->delay_ns != 0) {
        const kvs_u64 begin = clock_ns();
        const kvs_u32 mixed = ((kvs_u32)begin ^ blockIdx.x * 2654435761u ^ blockIdx.z * 40503u) * 2246822519u;
        const kvs_u32 late = (mixed >> 12) % words->delay_ns;
        while (clock_ns() - begin < late) {
            __nanosleep(200);
        }
    }
}

/* One thread. Demands that have arrived, more than `demand`; all of them where the pass is given up. */
__device__ inline kvs_u64 poll_ready(const kvs_step_words *words, kvs_u64 demand)
{
    kvs_u64 ready = load_acquire(words->ready);
    if (ready > demand) {
        return ready;
    }
    volatile kvs_u32 *given_up = (volatile kvs_u32 *)words->given_up, *stop = (volatile kvs_u32 *)words->stop;
    const kvs_u64 begin = clock_ns();
    for (kvs_u32 polls = 1; (ready = load_acquire(words->ready)) <= demand; polls++) {
        const bool is_late = polls % KVS_POLLS == 0 && (*stop != 0 || clock_ns() - begin > words->limit_ns);
        if (is_late || *given_up != 0) {
            *given_up = 1;
            *stop = 1;
            __threadfence_system();
            return ~0ull;
        }
        __nanosleep(100);
    }
    return ready;
}

/* One thread, behind a barrier after all of the block's reads of the page. */
__device__ inline void leave_page(const page_gate *gate, kvs_u32 page, kvs_u32 n_readers)
{
    if (!is_streamed(gate, page)) {
        return;
    }
    const kvs_step_words *words = gate->words;
    const kvs_u64 demand = gate->first_demand + (page - gate->first_page);
    const kvs_u32 slot = (kvs_u32)((demand - words->base_demand) % words->n_slots);
    kvs_u32 *arrivals = (kvs_u32 *)words->arrivals + slot;
    volatile kvs_u64 *completed = (volatile kvs_u64 *)words->completed;
    unsigned long long *consumed = (unsigned long long *)words->consumed;
    __threadfence_system();
    if (atomicAdd(arrivals, 1u) + 1 != n_readers) {
        return;
    }
    *(volatile kvs_u32 *)arrivals = 0;
    if (page + 1 == gate->end_page) {
        gate->note->left_ns = clock_ns();
    }
    __threadfence_system();
    completed[slot] = demand + 1;
    /* Whoever completes the page at `consumed` goes on over pages that were completed before; either it sees them here, or who
     * completed them sees what it has raised. */
    __threadfence_system();
    kvs_u64 at = *(volatile kvs_u64 *)consumed;
    while (completed[(at - words->base_demand) % words->n_slots] == at + 1) {
        __threadfence_system();
        const kvs_u64 before = atomicCAS_system(consumed, at, at + 1);
        at = before == at ? at + 1 : before;
        __threadfence_system();
    }
}

/* All threads of the block, before they read the page. `seen` lies in shared memory; a barrier lies between two calls. */
__device__ inline void await_page(page_gate *gate, kvs_u32 page, kvs_u64 *seen)
{
    if (!is_streamed(gate, page)) {
        return;
    }
    const kvs_u64 demand = gate->first_demand + (page - gate->first_page);
    if (gate->ready > demand) {
        return;
    }
    if (threadIdx.x == 0) {
        come_late(gate->words);
        if (page == gate->first_page) {
            const kvs_u64 ready = load_acquire(gate->words->ready);
            gate->note->wanted_ns = clock_ns();
            gate->note->n_lying = ready > demand ? ready - demand : 0;
        }
        *seen = poll_ready(gate->words, demand);
    }
    __syncthreads();
    gate->ready = *seen;
}

__device__ inline kvs_u32 take_ticket(kvs_u64 address)
{
    return atomicAdd((kvs_u32 *)address, 1u);
}

#else /* run on a host, block after block, all pages there */

__device__ inline void come_late(const kvs_step_words *) {}
__device__ inline void leave_page(const page_gate *, kvs_u32, kvs_u32) {}
__device__ inline void await_page(page_gate *, kvs_u32, kvs_u64 *) {}
__device__ inline kvs_u32 take_ticket(kvs_u64 address)
{
    return (*(kvs_u32 *)address)++;
}

#endif

#endif

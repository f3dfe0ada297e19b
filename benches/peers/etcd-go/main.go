// The workloads of benches/peers/stores.sh with etcd's own concurrency.Mutex. Arguments: workload, HOST:PORT, tasks, seconds,
// seconds of warm-up, prefix of the keys.
//
// Prints "ready", waits for a line, works, prints "done" and one line of JSON, and ends when standard input does.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

type task struct {
	waits  []int64
	pairs  int64
	errors int64
}

func main() {
	workload, prefix := os.Args[1], os.Args[6]
	tasks, err := strconv.Atoi(os.Args[3])
	check(err)
	measured, warmup := seconds(os.Args[4]), seconds(os.Args[5])
	if workload != "parallel" && workload != "contended" {
		os.Exit(3)
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{os.Args[2]}, DialTimeout: 5 * time.Second})
	check(err)
	mutexes := make([]*concurrency.Mutex, tasks)
	var shared *concurrency.Session
	for i := range mutexes {
		name := prefix + "0"
		if workload == "parallel" {
			name = prefix + strconv.Itoa(i)
		}
		// Mutexes of one session do not exclude each other.
		if shared == nil || workload == "contended" {
			shared, err = concurrency.NewSession(client)
			check(err)
		}
		mutexes[i] = concurrency.NewMutex(shared, name)
	}
	measure(mutexes, warmup)
	fmt.Println("ready")
	in := bufio.NewReader(os.Stdin)
	if _, err := in.ReadString('\n'); err != nil {
		os.Exit(1)
	}
	done := measure(mutexes, measured)
	fmt.Println("done")
	report(done, workload, measured)
	_, _ = io.Copy(io.Discard, in)
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func seconds(text string) time.Duration {
	value, err := strconv.ParseFloat(text, 64)
	check(err)
	return time.Duration(value * float64(time.Second))
}

func measure(mutexes []*concurrency.Mutex, d time.Duration) []task {
	all := make([]task, len(mutexes))
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	for i, mutex := range mutexes {
		wg.Add(1)
		go func() {
			defer wg.Done()
			ctx := context.Background()
			var mine task
			for now := time.Now(); now.Before(end); now = time.Now() {
				if mutex.Lock(ctx) != nil {
					mine.errors++
					continue
				}
				mine.waits = append(mine.waits, int64(time.Since(now)))
				if mutex.Unlock(ctx) != nil {
					mine.errors++
					continue
				}
				mine.pairs++
			}
			all[i] = mine
		}()
	}
	wg.Wait()
	return all
}

func report(done []task, workload string, measured time.Duration) {
	var waits []int64
	var errors int64
	counts := make([]int64, len(done))
	for i, task := range done {
		waits = append(waits, task.waits...)
		counts[i] = task.pairs
		errors += task.errors
	}
	slices.Sort(waits)
	quantile := func(q float64) float64 {
		if len(waits) == 0 {
			return 0
		}
		return float64(waits[min(len(waits)-1, int(float64(len(waits))*q))]) / 1e3
	}
	version := ""
	info, _ := debug.ReadBuildInfo()
	for _, dep := range info.Deps {
		if dep.Path == "go.etcd.io/etcd/client/v3" {
			version = strings.TrimPrefix(dep.Version, "v")
		}
	}
	line, err := json.Marshal(map[string]any{
		"workload":   workload,
		"seconds":    measured.Seconds(),
		"task_pairs": counts,
		"p50_us":     quantile(0.5),
		"p99_us":     quantile(0.99),
		"p999_us":    quantile(0.999),
		"errors":     errors,
		"version":    version,
		"runtime":    "Go " + strings.TrimPrefix(runtime.Version(), "go"),
	})
	check(err)
	fmt.Println(string(line))
}

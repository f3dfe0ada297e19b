// The workloads of benches/peers with redsync. Arguments: workload, URL, tasks, seconds, seconds of warm-up, prefix of
// the keys.
//
// Prints "ready", waits for a line, works, prints "done" and one line of JSON, and ends when standard input does.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	goredislib "github.com/redis/go-redis/v9"
)

type task struct {
	waits  []int64
	pairs  int64
	errors int64
}

var (
	workload string
	url      string
	tasks    int
	prefix   string
	in       = bufio.NewReader(os.Stdin)
)

func main() {
	workload, url, prefix = os.Args[1], os.Args[2], os.Args[6]
	tasks, _ = strconv.Atoi(os.Args[3])
	measured, warmup := seconds(os.Args[4]), seconds(os.Args[5])
	var measure func(time.Duration) []task
	switch workload {
	case "parallel", "contended":
		rs := connect()
		measure = func(d time.Duration) []task { return pairs(rs, d) }
	case "wakeup":
		mine, theirs := connect(), connect()
		measure = func(d time.Duration) []task { return wakeup(mine, theirs, d) }
	default:
		os.Exit(3)
	}
	measure(warmup)
	fmt.Println("ready")
	if _, err := in.ReadString('\n'); err != nil {
		os.Exit(1)
	}
	done := measure(measured)
	fmt.Println("done")
	report(done, measured)
	_, _ = io.Copy(io.Discard, in)
}

func seconds(text string) time.Duration {
	value, err := strconv.ParseFloat(text, 64)
	if err != nil {
		panic(err)
	}
	return time.Duration(value * float64(time.Second))
}

// A pool as large as there are goroutines, so that none waits for a connection.
func connect() *redsync.Redsync {
	options, err := goredislib.ParseURL(url)
	if err != nil {
		panic(err)
	}
	options.PoolSize = max(tasks, 10)
	options.MinIdleConns = min(tasks, options.PoolSize)
	return redsync.New(goredis.NewPool(goredislib.NewClient(options)))
}

func pairs(rs *redsync.Redsync, d time.Duration) []task {
	all := make([]task, tasks)
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	for i := range all {
		name := prefix + "0"
		if workload == "parallel" {
			name = prefix + strconv.Itoa(i)
		}
		wg.Go(func() {
			mutex := rs.NewMutex(name)
			var mine task
			for now := time.Now(); now.Before(end); now = time.Now() {
				if mutex.Lock() != nil {
					mine.errors++
					continue
				}
				mine.waits = append(mine.waits, int64(time.Since(now)))
				if ok, err := mutex.Unlock(); !ok || err != nil {
					mine.errors++
					continue
				}
				mine.pairs++
			}
			all[i] = mine
		})
	}
	wg.Wait()
	return all
}

// From the call of Unlock with one client to the return of Lock with the other one, which waits meanwhile.
func wakeup(mine, theirs *redsync.Redsync, d time.Duration) []task {
	var result task
	holder, waiter := mine.NewMutex(prefix), theirs.NewMutex(prefix)
	for end := time.Now().Add(d); time.Now().Before(end); {
		if holder.Lock() != nil {
			result.errors++
			continue
		}
		at := make(chan time.Time)
		go func() {
			if waiter.Lock() != nil {
				close(at)
				return
			}
			now := time.Now()
			_, _ = waiter.Unlock()
			at <- now
		}()
		time.Sleep(20*time.Millisecond + time.Duration(rand.Int63n(int64(100*time.Millisecond))))
		released := time.Now()
		_, _ = holder.Unlock()
		had, ok := <-at
		if !ok {
			result.errors++
			continue
		}
		result.waits = append(result.waits, int64(had.Sub(released)))
		result.pairs++
	}
	return []task{result}
}

func report(done []task, measured time.Duration) {
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
	version, client := "", ""
	info, _ := debug.ReadBuildInfo()
	for _, dep := range info.Deps {
		switch dep.Path {
		case "github.com/go-redsync/redsync/v4":
			version = strings.TrimPrefix(dep.Version, "v")
		case "github.com/redis/go-redis/v9":
			client = strings.TrimPrefix(dep.Version, "v")
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
		"runtime":    "Go " + strings.TrimPrefix(runtime.Version(), "go") + ", go-redis " + client,
	})
	if err != nil {
		panic(err)
	}
	fmt.Println(string(line))
}
